//! Compresses pages of memory, and knows which codec pays.
