"""The experiments of the Soft MoE and the muMoE paper, run again beside what they print."""
