"""The experiments: data, model, reward and metrics, one module each."""
