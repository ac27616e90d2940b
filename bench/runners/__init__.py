"""What takes part in a benchmark: PyTorch, ONNX Runtime and TensorRT, by one contract."""
