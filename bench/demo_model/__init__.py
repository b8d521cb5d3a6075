"""The demo model: its data, its training, its export and its evaluation."""
