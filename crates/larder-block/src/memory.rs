//! Memory management of the process.

/// Returns free heap memory to the kernel. For callers that have freed much memory that is not needed again soon: the
/// allocator of the C library otherwise retains about as much as the largest pieces that were freed.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it accesses only the allocator's own memory, under its locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Prefetches the cache line of a byte, without waiting.
pub fn prefetch_cache_line(byte: &u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing and only affects timing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(byte).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = byte;
}
