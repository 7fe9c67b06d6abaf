"""Other frameworks: one file each, and each imports its own only when it is used."""
