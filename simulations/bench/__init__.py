"""What messages, packing, spaces, lifts, sums, sampling and training cost: ``make bench``."""
