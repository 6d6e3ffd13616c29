"""Questions that take more than one run to answer, each with a table and a figure."""
