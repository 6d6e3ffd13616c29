"""A trained model as a file that others can use: ONNX, a torch program, a scikit-learn estimator.

What stands before the weights (the data set's scale, seeded lifts) and behind them (probabilities,
classes, votes of several models) goes into the file.
"""
