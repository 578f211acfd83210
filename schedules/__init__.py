"""pipelane's own schedules, one file per family, registered as plug-ins like anybody's."""
