"""Dense work in AWS Lambda: controller, tensor server, and a local service that stands for AWS."""
