"""What a good-enough space is: ball, ellipsoid, set of balls, class-moment cone; its files."""
