//! The memory images to send.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::Context as _;
use larder_bench::campaign::Random;
use larder_codec::batch::BATCH_BYTES;
use larder_codec::measure::MemoryContent;
use larder_codec::{PAGE, uniform_word};

/// Pages that reach a codec, a whole number of batches. Uniform pages are sent in another way, and are left out.
pub(super) struct Image {
    pub(super) name: String,
    pub(super) pages: Vec<u8>,
}

/// Composition of the mixes in %, with stretches of up to 8 MiB.
const MIXES: [(&str, &[(MemoryContent, u64)]); 4] = [
    (
        "server",
        &[
            (MemoryContent::Text, 35),
            (MemoryContent::Heap, 30),
            (MemoryContent::Code, 15),
            (MemoryContent::Sparse, 10),
            (MemoryContent::Random, 10),
        ],
    ),
    (
        "database",
        &[
            (MemoryContent::Sequence, 30),
            (MemoryContent::Heap, 30),
            (MemoryContent::Json, 20),
            (MemoryContent::Random, 20),
        ],
    ),
    ("media", &[(MemoryContent::Random, 80), (MemoryContent::Code, 10), (MemoryContent::Heap, 10)]),
    ("counters", &[(MemoryContent::Counter, 60), (MemoryContent::Sequence, 20), (MemoryContent::Sparse, 20)]),
];
const STRETCH_BATCHES_MAX: u64 = 32;

/// Generates images of all kinds, and of the mixes.
pub(super) fn made(bytes: usize, seed: u64) -> impl Iterator<Item = Image> {
    let kinds = MemoryContent::ALL.into_iter().map(move |kind| Image {
        name: kind.name().to_owned(),
        pages: non_uniform_pages(|seed_offset| kind.generate(bytes, seed + seed_offset), bytes),
    });
    let mixes =
        MIXES.into_iter().map(move |(name, parts)| Image { name: name.to_owned(), pages: mixed(parts, bytes, seed) });
    kinds.chain(mixes)
}

fn mixed(parts: &[(MemoryContent, u64)], bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut pages = Vec::with_capacity(bytes);
    let mut stretches = 0;
    while pages.len() < bytes {
        let mut at = random.below(100);
        let part = parts.iter().find(|part| {
            let is_selected = at < part.1;
            at = at.saturating_sub(part.1);
            is_selected
        });
        let len = (1 + random.below(STRETCH_BATCHES_MAX) as usize) * BATCH_BYTES;
        stretches += 1;
        if let Some((kind, _)) = part {
            pages.extend(non_uniform_pages(|more| kind.generate(len, seed + stretches + more), len));
        }
    }
    pages.truncate(bytes / BATCH_BYTES * BATCH_BYTES);
    pages
}

/// Returns `bytes` of pages that are not uniform, from memory that is generated as often as necessary.
fn non_uniform_pages(memory: impl Fn(u64) -> Vec<u8>, bytes: usize) -> Vec<u8> {
    const GENERATIONS_MAX: u64 = 64;
    let mut pages = Vec::with_capacity(bytes);
    for more in 0..GENERATIONS_MAX {
        add(&mut pages, &memory(more << 32), bytes);
        if pages.len() >= bytes {
            break;
        }
    }
    pages.truncate(pages.len() / BATCH_BYTES * BATCH_BYTES);
    pages
}

fn add(pages: &mut Vec<u8>, memory: &[u8], bytes: usize) {
    for page in memory.as_chunks::<PAGE>().0 {
        if pages.len() < bytes && uniform_word(page).is_none() {
            pages.extend_from_slice(page);
        }
    }
}

impl Image {
    /// Reads the first `bytes` of a file's pages that are not uniform.
    pub(super) fn of_file(path: &Path, bytes: usize) -> anyhow::Result<Self> {
        let failed = || format!("cannot read {}", path.display());
        let file = File::open(path).with_context(failed)?;
        let mut pages = Vec::new();
        let mut buffer = vec![0; 1 << 20];
        let mut at = 0;
        while pages.len() < bytes {
            let len = file.read_at(&mut buffer, at).with_context(failed)?;
            if len < PAGE {
                break;
            }
            let len = len / PAGE * PAGE;
            add(&mut pages, &buffer[..len], bytes);
            at += len as u64;
        }
        pages.truncate(pages.len() / BATCH_BYTES * BATCH_BYTES);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, pages })
    }
}
