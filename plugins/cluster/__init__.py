"""Work shared out to the nodes of a Ray cluster."""
