"""What an engine tells about itself: histograms, step traces and the text that Prometheus reads."""
