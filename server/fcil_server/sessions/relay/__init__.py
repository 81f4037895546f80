"""The relay program: one uplink for many clients, without any key of theirs."""
