"""What a model keeps of the untouched one: the data in two halves, the measure, the proof."""
