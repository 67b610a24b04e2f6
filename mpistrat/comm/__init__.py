"""Communication between ranks: transports, reducers, wire format and packing."""
