"""What calibration counts: where tokens come from, and their counts on Ray Data."""
