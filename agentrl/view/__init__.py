"""Run folders, looked at: in a browser, as one HTML file to share, and in words. No torch, no learner."""
