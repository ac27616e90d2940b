"""What takes part in a benchmark: PyTorch, ONNX Runtime, OpenVINO and TensorRT, by one contract."""
