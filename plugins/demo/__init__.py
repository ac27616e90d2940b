"""What `moexport demo` does: real data, networks that it trains, and the whole job on them."""
