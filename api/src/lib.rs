//! The gantry.dev API: custom resources, annotations and names shared by both daemons.
