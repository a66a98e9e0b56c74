"""Workers that measure a cluster instead of training on it: `orch bench` starts them under the
usual agents."""
