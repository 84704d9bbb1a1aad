//! System calls made in another process, by one of its threads while that is stopped.
