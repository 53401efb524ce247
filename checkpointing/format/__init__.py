"""What lies in a store: names, boxes, segments, manifests. It decides nothing."""
