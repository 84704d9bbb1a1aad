//! Machine code of another process, with which its threads make calls and restore themselves.

use rustix::process::Pid;

use super::arch::INSTRUCTIONS;
use super::error::InjectError;
use super::memory::{self, Mapping};

/// Maximum number of bytes to search. The code is found within the first 1 MiB of the libc, or in a statically linked
/// program.
const SEARCH_BYTES_MAX: u64 = 256 << 20;

/// Bytes read at a time. Parts overlap by the length of the longest pattern, which may cross a boundary.
const CHUNK_BYTES: u64 = 128 << 10;
const OVERLAP_BYTES: u64 = 16;

/// Addresses of the machine code.
#[derive(Debug)]
pub(super) struct Code {
    /// A system call, followed by a return.
    pub(super) call: u64,
    /// A call of `rt_sigreturn`.
    pub(super) sigreturn: u64,
}

impl Code {
    /// Searches the mappings of a process.
    pub(super) fn find(pid: Pid, tid: Pid, mappings: &[Mapping]) -> Result<Self, InjectError> {
        let mut code_mappings: Vec<&Mapping> = mappings.iter().filter(|mapping| mapping.is_code()).collect();
        code_mappings.sort_by_key(|mapping| !is_libc(&mapping.path));
        let mut found = [None; INSTRUCTIONS.len()];
        let mut bytes_left = SEARCH_BYTES_MAX;
        for mapping in code_mappings {
            let mut at = mapping.range.start;
            while at < mapping.range.end && bytes_left > 0 {
                let bytes = (mapping.range.end - at).min(CHUNK_BYTES + OVERLAP_BYTES);
                let mut part = vec![0; usize::try_from(bytes).unwrap_or(0)];
                // The range is past the end of its file, or was unmapped meanwhile.
                if memory::read(tid, at, &mut part).is_err() {
                    break;
                }
                search_in(&part, at, &mut found);
                if let [Some(call), Some(give_back)] = found {
                    return Ok(Self { call, sigreturn: give_back });
                }
                at += CHUNK_BYTES;
                bytes_left = bytes_left.saturating_sub(CHUNK_BYTES);
            }
        }
        let missing = INSTRUCTIONS.iter().zip(found).find(|(_, found)| found.is_none());
        Err(InjectError::NoInstruction { pid, what: missing.map_or("code", |((_, what), _)| what) })
    }

    /// Returns true if the code is still there.
    pub(super) fn is_present_in(&self, tid: Pid) -> bool {
        [self.call, self.sigreturn].iter().zip(INSTRUCTIONS).all(|(at, (variants, _))| {
            variants.iter().any(|code| {
                let mut current = vec![0; code.len()];
                memory::read(tid, *at, &mut current).is_ok() && current == *code
            })
        })
    }
}

fn search_in(part: &[u8], at: u64, found: &mut [Option<u64>]) {
    for (found, (variants, _)) in found.iter_mut().zip(INSTRUCTIONS) {
        let offset = variants.iter().filter_map(|code| part.windows(code.len()).position(|there| there == *code)).min();
        *found = found.or(offset.map(|offset| at + offset as u64));
    }
}

/// Returns true for the names of glibc's and musl's libraries.
fn is_libc(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.starts_with("libc.so") || name.starts_with("libc-") || name.starts_with("ld-musl")
}
