//! Tests of accelerators: each request is returned once, with the output of its method, and allocates nothing.
//!
//! The file has a single test, because all allocations of the process are counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_codec::PAGE;
use larder_codec::accelerator::{Dispatcher, EncodeOutcome, Instance, PageBuffer, RequestPool, SoftwarePath, find};
use larder_codec::batch::{BATCH_PAGES, Decoder, Method};
use larder_codec::measure::MemoryContent;
use larder_codec::select::{BatchClass, BatchEncoding, Selector, SenderProfile};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: all work is done by the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's guarantee is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// All parts that a batch passes through.
struct Sending {
    pool: RequestPool,
    dispatcher: Dispatcher,
    selector: Selector,
    decoder: Decoder,
    pages: Vec<u8>,
    memory: Arc<PageBuffer>,
}

impl Sending {
    fn new() -> Self {
        let found = find(SoftwarePath::Disabled);
        let there = found.available;
        assert!(there.iter().any(|accelerator| accelerator.name() == "igzip"), "igzip is missing: {:?}", found.missing);
        let mut instances: Vec<Box<dyn Instance>> = Vec::new();
        for accelerator in &there {
            for _ in 0..3 {
                instances.push(accelerator.open().expect("opens"));
            }
        }
        let mut memory = PageBuffer::new(8 * BATCH_PAGES);
        let mixed = MemoryContent::Mixed.generate(memory.len(), 4);
        memory.copy_from_slice(&mixed);
        let sender = SenderProfile { encoders: 2, link_bytes_per_second: 125_000_000 };
        Self {
            pool: RequestPool::new(9),
            dispatcher: Dispatcher::new(instances),
            selector: Selector::new(&BatchEncoding::all().collect::<Vec<_>>(), sender, 64),
            decoder: Decoder::new(),
            pages: vec![0; BATCH_PAGES * PAGE],
            memory: Arc::new(memory),
        }
    }

    /// Encodes `batches` batches by all methods, in one run and in several, some of them exceeding their limit.
    fn send(&mut self, batches: u64) {
        let mut given_back = 0;
        for tag in 0..batches {
            let mut request = loop {
                match self.pool.take() {
                    Some(request) => break request,
                    None => given_back += u64::from(self.take_one()),
                }
            };
            let pages = 1 + (tag as usize * 7) % BATCH_PAGES;
            let from = (tag as usize * 13) % (7 * BATCH_PAGES) * PAGE;
            let method = Method::ALL[(tag as usize / 2) % Method::COUNT];
            let limit = pages * PAGE * 31 / 32;
            if tag % 2 == 0 {
                let run = from..from + pages * PAGE;
                request.fill(tag, method, Arc::clone(&self.memory), [run], limit);
            } else {
                let runs = (0..pages).map(|page| from + page * PAGE..from + (page + 1) * PAGE);
                request.fill(tag, method, Arc::clone(&self.memory), runs, limit);
            }
            let class = BatchClass::of(&[&self.memory[from..from + pages * PAGE]]);
            self.selector.pick(tag / 4, class, pages);
            let mut refused = self.dispatcher.submit(request).err();
            while let Some(request) = refused {
                given_back += u64::from(self.take_one());
                refused = self.dispatcher.submit(request).err();
            }
        }
        while self.pool.in_use() > 0 {
            given_back += u64::from(self.take_one());
        }
        assert_eq!((given_back, self.dispatcher.in_flight()), (batches, 0));
    }

    fn take_one(&mut self) -> bool {
        let Some(request) = self.dispatcher.poll() else {
            return false;
        };
        let out = &mut self.pages[..request.input_bytes()];
        let encoded = match request.outcome() {
            EncodeOutcome::Encoded(bytes) => {
                assert_eq!(request.output().len(), bytes);
                let decoded = self.decoder.decode(request.method(), request.output(), out);
                assert!(decoded.is_ok() && request.input().flatten().eq(&*out), "{:?}", request.tag());
                Some(bytes)
            }
            EncodeOutcome::Incompressible => None,
            other => panic!("{other:?}"),
        };
        let class = BatchClass::of(&[&self.memory[..PAGE]]);
        self.selector.record(
            request.tag() / 4,
            class,
            request.method().into(),
            out.len() / PAGE,
            encoded,
            request.ns(),
        );
        self.selector.record_sent(encoded.unwrap_or(out.len()) as u64, 1000);
        self.pool.recycle(request);
        true
    }
}

/// Requests are returned once, decode correctly, and allocate nothing after a warm-up.
#[test]
fn requests_return_once_without_allocation() {
    let mut sending = Sending::new();
    sending.send(1000);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    sending.send(2000);
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0, "allocations");

    let statistics: Vec<_> = sending.dispatcher.statistics().collect();
    assert_eq!(statistics.iter().map(|one| one.statistics.completed).sum::<u64>(), 3000);
    for one in &statistics[..6] {
        let done = one.statistics;
        assert_eq!(done.submitted, done.completed, "{one:?}");
        assert_eq!(done.failed, 0, "{one:?}");
        // Every instance was used.
        assert!(
            done.completed > 100 && done.incompressible > 0 && done.bytes_out < done.bytes_in && done.ns > 0,
            "{one:?}"
        );
    }
    let others = statistics.last().expect("the dispatcher itself");
    assert_eq!(others.statistics.submitted, 0, "all methods have an instance");
    // The buffer is not referenced any more.
    assert!(Arc::get_mut(&mut sending.memory).is_some());
}
