"""What a technique is told, fills and writes."""
