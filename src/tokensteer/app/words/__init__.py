"""Names and numbers as people write them."""
