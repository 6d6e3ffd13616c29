"""Server side: the neurons of many nodes merged into one layer."""
