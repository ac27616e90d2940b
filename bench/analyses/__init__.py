"""What the Soft MoE paper asks of a classifier: which k of its experts, and how good a choice."""
