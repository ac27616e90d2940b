"""The networks around the MoE layers, written here so that a checkpoint loads without its code."""
