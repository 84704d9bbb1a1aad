//! Feeds a channel to a parser, in pieces and with flushes, and checks the properties that hold for any bytes.
#![allow(dead_code, unreachable_pub, reason = "each program uses a part of it")]

use std::ops::Range;

use larder_migrate::stream::{
    Blocks, PAGE_HEADER, ParseStep, Parser, StreamFacts, ZERO_RECORD, page_header, zero_record,
};

use super::writer::{PAGE, Place};

/// Schedule of arriving bytes and flushes.
pub trait Cuts {
    /// Returns the number of bytes that arrive next.
    fn arrive(&mut self) -> usize;
    /// Returns true if all bytes present must be passed now, when the parser asks for more.
    fn flush(&mut self) -> bool;
}

/// Schedule that delivers all bytes at once.
pub struct Whole;

impl Cuts for Whole {
    fn arrive(&mut self) -> usize {
        usize::MAX
    }

    fn flush(&mut self) -> bool {
        false
    }
}

/// Result of parsing a channel.
#[derive(Debug, Default)]
pub struct Reading {
    /// Pages reported; `from` equals `at` here.
    pub pages: Vec<Place>,
    pub zeros: Vec<Place>,
    pub literal: usize,
    /// Ranges that were passed although the parser needed more bytes.
    pub passed: Vec<Range<usize>>,
    pub facts: StreamFacts,
}

/// Parses a channel from its first byte to its last. Bytes left at the end are passed.
///
/// # Panics
/// A step contradicts its bytes, or the steps together are not the channel.
pub fn read(blocks: &Blocks, bytes: &[u8], cuts: &mut impl Cuts) -> Reading {
    let mut parser = Parser::new(blocks);
    let mut reading = Reading::default();
    let mut rebuilt = Vec::with_capacity(bytes.len());
    let (mut from, mut to) = (0, 0);
    while from < bytes.len() {
        to = bytes.len().min(cuts.arrive().saturating_add(to));
        loop {
            let there = &bytes[from..to];
            let Some(len) = step(&mut parser, blocks, there, from, &mut reading, &mut rebuilt) else {
                if to == bytes.len() || cuts.flush() {
                    parser.pass(there);
                    rebuilt.extend_from_slice(there);
                    reading.passed.push(from..to);
                    reading.literal += there.len();
                    from = to;
                }
                break;
            };
            from += len;
        }
    }
    assert_eq!(rebuilt.len(), bytes.len());
    assert!(rebuilt == bytes, "the steps are not the channel");
    assert_eq!(parser.facts().bytes, bytes.len() as u64);
    reading.facts = parser.facts().clone();
    reading
}

/// Takes one step; returns `None` if the parser needs more bytes.
fn step(
    parser: &mut Parser,
    blocks: &Blocks,
    there: &[u8],
    from: usize,
    reading: &mut Reading,
    rebuilt: &mut Vec<u8>,
) -> Option<usize> {
    let step = parser.next(there);
    let len = step.len();
    assert!(len <= there.len(), "{step:?} of {} bytes", there.len());
    let place = |at: usize, block, page: u32| {
        let block = blocks.get(block).expect("a block that was told is known");
        let pages = block.len_bytes.map_or(1 << 32, |bytes| bytes / PAGE as u64);
        assert!(u64::from(page) < pages, "page {page} of {pages}");
        Place { from: from + at, at: from + at, block: String::from_utf8_lossy(&block.name).into(), page }
    };
    match step {
        ParseStep::NeedMore { at_least } => {
            assert!(at_least > there.len() && at_least <= Parser::LOOKAHEAD, "{step:?}");
            return None;
        }
        ParseStep::Literal { .. } => {
            reading.literal += len;
            rebuilt.extend_from_slice(&there[..len]);
        }
        ParseStep::Pages { block, pages } => {
            assert!((1..=128).contains(&pages.len()), "{step:?}");
            for (index, page) in pages.iter().enumerate() {
                reading.pages.push(place(index * PAGE, block, page.get()));
            }
            rebuilt.extend_from_slice(&there[..len]);
        }
        ParseStep::Record { block, page } => {
            reading.pages.push(place(PAGE_HEADER, block, page.get()));
            rebuilt.extend_from_slice(&page_header(page));
            rebuilt.extend_from_slice(&there[PAGE_HEADER..len]);
        }
        ParseStep::Zeros { block, first, count } => {
            for index in 0..count {
                let page = larder_migrate::stream::PageIndex::new(first.get() + index);
                reading.zeros.push(place(index as usize * ZERO_RECORD, block, page.get()));
                rebuilt.extend_from_slice(&zero_record(page));
            }
        }
    }
    assert!(len > 0, "{step:?} consumes nothing");
    Some(len)
}
