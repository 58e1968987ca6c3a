"""Write, read and compress the HDF5 file of one group."""
