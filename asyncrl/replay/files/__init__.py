"""The HDF5 file of one group: its format, writer, reader and compression."""
