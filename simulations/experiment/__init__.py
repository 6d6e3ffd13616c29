"""One run: its data, models and training, its execution, its progress bar."""
