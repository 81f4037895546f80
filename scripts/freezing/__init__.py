"""What `scripts/vectors` freezes: bytes as this version of fcil writes them."""
