//! Tests of the guarantees for a migration: the older page and the delta give the newer page, and arbitrary input
//! does no harm.

use larder_codec::PAGE;
use larder_codec::delta::{ApplyError, DELTA_BYTES_MAX, apply, changed_words, encode};
use proptest::collection::vec;
use proptest::prelude::*;

type Page = Box<[u8; PAGE]>;

const WORDS: usize = PAGE / 8;

fn page_of(bytes: &[u8]) -> Page {
    Box::new(std::array::from_fn(|at| bytes[at % bytes.len()]))
}

fn word(page: &[u8; PAGE], at: usize) -> u64 {
    u64::from_le_bytes(page[8 * at..][..8].try_into().unwrap())
}

fn add(page: &mut [u8; PAGE], at: usize, difference: u64) {
    let sum = word(page, at).wrapping_add(difference);
    page[8 * at..][..8].copy_from_slice(&sum.to_le_bytes());
}

/// Generates small and large differences, of either sign, at the bounds of each width.
fn differences() -> impl Strategy<Value = u64> {
    prop_oneof![
        -3..=3_i64,
        prop::sample::select(vec![-129, -128, 127, 128, -32769, -32768, 32767, 32768]),
        prop::sample::select(vec![i64::from(i32::MIN) - 1, i32::MIN.into(), i32::MAX.into(), 1 << 31]),
        any::<i64>(),
    ]
    .prop_map(|difference| difference as u64)
}

/// Generates a page and a later version of it.
fn versions() -> impl Strategy<Value = (Page, Page)> {
    let older = vec(any::<u8>(), 1..64).prop_map(|bytes| page_of(&bytes));
    let change = prop_oneof![
        Just(vec![]),
        vec((0..WORDS, differences()), 1..20),
        vec((0..WORDS, -100..100_i64).prop_map(|(at, by)| (at, by as u64)), 1..400),
        (differences(), vec(0..WORDS, 1..600)).prop_map(|(by, words)| words.into_iter().map(|at| (at, by)).collect()),
        differences().prop_map(|by| (0..WORDS).map(|at| (at, by)).collect()),
        vec(differences(), WORDS).prop_map(|all| all.into_iter().enumerate().collect()),
        vec(any::<u64>(), WORDS).prop_map(|all| all.into_iter().enumerate().collect()),
    ];
    (older, change).prop_map(|(old, change)| {
        let mut new = old.clone();
        for (at, difference) in change {
            add(&mut new, at, difference);
        }
        (old, new)
    })
}

fn encoded(new: &[u8; PAGE], old: &[u8; PAGE]) -> Vec<u8> {
    let mut out = vec![0; DELTA_BYTES_MAX];
    let len = encode(new, old, &mut out).expect("there is room for any delta");
    out.truncate(len);
    out
}

proptest! {
    /// A delta restores the newer page, has the documented length, and respects the output limit.
    #[test]
    fn delta_restores_newer_page(
        (old, new) in versions(),
        more in vec(any::<u8>(), 0..20),
        room in 0..DELTA_BYTES_MAX,
    ) {
        let changed = (0..WORDS).filter(|&at| word(&old, at) != word(&new, at)).count();
        prop_assert_eq!(changed_words(&new, &old) as usize, changed);
        let delta = encoded(&new, &old);
        prop_assert!(delta.len() <= 1 + 72 + 8 * changed);

        let mut page = old.clone();
        prop_assert_eq!(apply(&mut page, &[&delta[..], &more].concat()), Ok(delta.len()));
        prop_assert!(page == new);

        for room in [room, delta.len() - 1, delta.len()] {
            let mut out = vec![0x5a; DELTA_BYTES_MAX];
            let fits = encode(&new, &old, &mut out[..room]);
            prop_assert_eq!(fits, (room >= delta.len()).then_some(delta.len()), "room for {}", room);
            prop_assert!(out[room..].iter().all(|&byte| byte == 0x5a));
        }
    }

    #[test]
    fn truncated_delta_leaves_page_unchanged((old, new) in versions(), cut in any::<prop::sample::Index>()) {
        let delta = encoded(&new, &old);
        let cut = cut.index(delta.len());
        let mut page = old.clone();
        match apply(&mut page, &delta[..cut]) {
            Err(ApplyError::Short { needed, len }) => prop_assert!(len == cut && cut < needed && needed <= delta.len()),
            other => prop_assert!(false, "{:?}", other),
        }
        prop_assert!(page == old);
    }

    #[test]
    fn refused_bytes_leave_page_unchanged(
        first in 0..32_u8,
        data in vec(prop_oneof![Just(0), Just(1), any::<u8>()], 0..2 * PAGE),
        bytes in vec(any::<u8>(), 1..64),
    ) {
        let old = page_of(&bytes);
        let mut page = old.clone();
        let data = [&[first][..], &data].concat();
        match apply(&mut page, &data) {
            Ok(taken) => prop_assert!((1..=data.len()).contains(&taken)),
            Err(_) => prop_assert!(page == old),
        }
    }
}

#[test]
fn uniform_increment_takes_9_bytes() {
    let old = page_of(&[1, 2, 3, 4, 5, 6, 7]);
    let mut new = old.clone();
    for at in 0..WORDS {
        add(&mut new, at, 1 << 40);
    }
    assert_eq!(encoded(&new, &old), [&[1][..], &(1_u64 << 40).to_le_bytes()].concat());
    add(&mut new, 17, 1);
    assert_eq!(encoded(&new, &old).len(), 1 + PAGE);
}

/// Deltas of the first version of the format stay readable.
#[test]
fn first_version_deltas_apply() {
    let old = page_of(&[0xff, 0, 0, 0, 0, 0, 0, 0]);
    let change = |changes: &[(usize, u64)]| {
        let mut new = old.clone();
        for &(at, by) in changes {
            add(&mut new, at, by);
        }
        new
    };
    let map = |tops: [u8; 8], bytes: &[u8]| [&tops[..], bytes].concat();
    let of = |first: u8, rest: &[u8], differences: &[u8]| [&[first][..], rest, differences].concat();
    let cases = [
        (change(&[]), vec![0]),
        (change(&[(0, 1)]), of(0x12, &map([1, 0, 0, 0, 0, 0, 0, 0], &[1]), &[1])),
        (
            change(&[(9, 300), (511, 1_u64.wrapping_neg())]),
            of(0x13, &map([2, 0, 0, 0, 0, 0, 0, 0x80], &[2, 0x80]), &[44, 1, 0xff, 0xff]),
        ),
        (
            change(&[(3, 1 << 30), (4, 5)]),
            of(0x14, &map([1, 0, 0, 0, 0, 0, 0, 0], &[0x18]), &[0, 0, 0, 0x40, 5, 0, 0, 0]),
        ),
        (change(&[(64, 1 << 40)]), of(0x15, &map([0, 1, 0, 0, 0, 0, 0, 0], &[1]), &(1_u64 << 40).to_le_bytes())),
        (
            change(&[(64, 1 << 40), (65, 1 << 40)]),
            of(0x11, &map([0, 1, 0, 0, 0, 0, 0, 0], &[3]), &(1_u64 << 40).to_le_bytes()),
        ),
    ];
    for (new, delta) in cases {
        assert_eq!(encoded(&new, &old), delta);
        let mut page = old.clone();
        assert_eq!(apply(&mut page, &delta), Ok(delta.len()));
        assert!(page == new);
    }
}

#[test]
fn unknown_encodings_are_refused() {
    let mut page = page_of(&[7]);
    for first in 0..=u8::MAX {
        let known = first == 0 || (first & 0xf0 <= 0x10 && (1..=5).contains(&(first & 0xf)));
        // A map of one word, and enough differences.
        let data = [&[first, 1, 0, 0, 0, 0, 0, 0, 0, 1][..], &[0; PAGE]].concat();
        match apply(&mut page, &data) {
            Err(ApplyError::Unknown(told)) => assert!(told == first && !known),
            other => assert!(known, "{first:#x}: {other:?}"),
        }
    }
    assert_eq!(apply(&mut page, &[0x12, 1, 2, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1]), Err(ApplyError::Map(9)));
}
