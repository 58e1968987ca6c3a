"""Episodes that other programs recorded: LeRobot v3 folders and robomimic files."""
