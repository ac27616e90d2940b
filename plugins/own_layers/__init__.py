"""Networks and mixture layers of the user's own."""
