"""A Flower app: logistic regression on irises, with scikit-learn."""
