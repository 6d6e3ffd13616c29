"""An ordinary Flower app: handwritten digits with scikit-learn."""
