//! Segments, entries and encoded pages of arbitrary bytes.

use larder_codec::{Codec, Decoder, PAGE};
use larder_memory::entry::{CopyLocation, EntryWord};
use larder_memory::segment_log::{SEGMENT_HEADER_BYTES, SegmentIndex, SegmentTable, data_at, object_at, objects_from};

use super::Input;

/// Parses `data` as a part of a segment from an arbitrary byte on, as encoded pages, and as entries.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let segment = SegmentIndex::new(u32::from(input.word()));
    let at = usize::from(input.word());
    segments(input.0, segment, at);
    segments(input.0, segment, SEGMENT_HEADER_BYTES);
    decoders(input.0);
    entries(input);
}

fn segments(bytes: &[u8], segment: SegmentIndex, at: usize) {
    let mut end = segment.start();
    for object in objects_from(bytes, segment.start(), at) {
        let place = object.stored.offset;
        let (from, to) = (data_at(place), data_at(place) + u64::from(object.stored.len));
        assert!(place.bytes() >= end, "{object:?} lies in the one before, which ends at {end}");
        assert!(to <= segment.start() + bytes.len() as u64, "{object:?} is cut off");
        assert!((1..=PAGE).contains(&usize::from(object.stored.len)) && from > place.bytes());
        end = to;
        let found = object_at(bytes, segment.start(), (place.bytes() - segment.start()) as usize);
        assert_eq!(found, Some(object));
    }
}

fn decoders(bytes: &[u8]) {
    let mut decoder = Decoder::new();
    for number in 0..=u8::MAX {
        let Ok(codec) = Codec::try_from(number) else { continue };
        let decode = |decoder: &mut Decoder, fill| {
            let mut page = [fill; PAGE];
            decoder.decode(codec, bytes, &mut page).is_ok().then_some(page)
        };
        // A decoded page contains nothing of the previous content of the buffer.
        let (first, second) = (decode(&mut decoder, 0), decode(&mut decoder, 0xff));
        assert!(first == second, "codec {number} leaves some of the page as it was");
    }
}

fn entries(mut input: Input<'_>) {
    let mut log = SegmentTable::new(8);
    let mut found = Vec::new();
    while !input.is_empty() {
        let word = EntryWord(input.long());
        let Some(location) = word.decode() else { continue };
        assert_eq!(EntryWord::encode(location).decode(), Some(location));
        if let CopyLocation::InTier { object: stored, .. } = location {
            let index = SegmentIndex::containing(stored.offset);
            let was_found = log.adopt(stored);
            assert!(!was_found || index.get() < log.count());
            found.extend(was_found.then_some(stored));
        }
    }
    assert!(log.used() <= log.count());
    for stored in found {
        log.remove_live(stored);
    }
    assert_eq!((log.live_bytes(), log.used()), (0, 0));
}
