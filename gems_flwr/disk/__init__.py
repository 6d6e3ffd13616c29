"""Files that are whole or not there, checksums, and folders that one process owns at a time."""
