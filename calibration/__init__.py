"""What a model is fed: real inputs for parity, accuracy and calibration."""
