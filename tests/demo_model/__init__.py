"""The demo model's data, sizes and export, and its training form beside the engine."""
