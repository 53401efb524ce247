"""The coordinator: one actor that knows who is there, and the parts that it is made of."""
