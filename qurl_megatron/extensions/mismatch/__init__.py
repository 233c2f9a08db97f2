"""`qurl mismatch`: how far is a quantized copy from its model, by token and by layer?"""
