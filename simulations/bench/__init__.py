"""What messages, packing, spaces, sums, sampling and training cost: ``make bench``."""
