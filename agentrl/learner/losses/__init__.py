"""Losses: from ratios and advantages to one number."""
