"""Examples of each expert: found, and shown with their images or texts."""
