"""How much quality a candidate keeps: the data split, the metric, the confirmation."""
