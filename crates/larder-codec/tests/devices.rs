//! Tests of device libraries by their software paths, where they are installed: `cargo test -p larder-codec --test
//! devices -- --ignored`. QATzip is in Debian 13 (`libqatzip3`). QPL is not in Debian, and must be built as a shared
//! library.

use std::sync::Arc;

use larder_codec::PAGE;
use larder_codec::accelerator::{Dispatcher, EncodeOutcome, PageBuffer, RequestPool, SoftwarePath, find};
use larder_codec::batch::{BATCH_PAGES, Decoder, Method};
use larder_codec::measure::MemoryContent;

fn makes_what_decodes(name: &str) {
    let found = find(SoftwarePath::Enabled);
    let Some(accelerator) = found.available.iter().find(|accelerator| accelerator.name() == name) else {
        panic!("{name} is missing: {:?}", found.missing);
    };
    assert_eq!(accelerator.methods(), [Method::Deflate]);
    let mut dispatcher = Dispatcher::new((0..2).map(|_| accelerator.open().expect("opens")).collect());
    let mut pool = RequestPool::new(4);
    let mut decoder = Decoder::new();
    let (mut bytes_in, mut bytes_out) = (0, 0);
    for kind in MemoryContent::ALL {
        let mut memory = PageBuffer::new(BATCH_PAGES);
        let generated = kind.generate(memory.len(), 6);
        memory.copy_from_slice(&generated);
        let memory = Arc::new(memory);
        for pages in [1, 2, 15, 16, 17, 31, 64] {
            for run_pages in [pages, 3] {
                let mut request = pool.take().expect("none is out");
                let end = pages * PAGE;
                let runs = (0..end).step_by(run_pages * PAGE).map(|from| from..end.min(from + run_pages * PAGE));
                request.fill(pages as u64, Method::Deflate, Arc::clone(&memory), runs, end * 31 / 32);
                assert!(dispatcher.submit(request).is_ok());
                let request = loop {
                    if let Some(request) = dispatcher.poll() {
                        break request;
                    }
                };
                match request.outcome() {
                    EncodeOutcome::Encoded(_) => {
                        let mut back = vec![0; end];
                        let decoded = decoder.decode(Method::Deflate, request.output(), &mut back);
                        assert_eq!(decoded, Ok(()), "{} {pages}", kind.name());
                        assert!(back == memory[..end]);
                        bytes_in += end;
                        bytes_out += request.output().len();
                    }
                    EncodeOutcome::Incompressible => assert!(
                        matches!(
                            kind,
                            MemoryContent::Random | MemoryContent::Base64 | MemoryContent::Code | MemoryContent::Mixed
                        ),
                        "{} {pages}",
                        kind.name()
                    ),
                    other => panic!("{}: {other:?}", kind.name()),
                }
                pool.recycle(request);
            }
        }
    }
    let statistics: Vec<_> = dispatcher.statistics().collect();
    println!("{name}: {:.2}:1, {statistics:?}", bytes_in as f64 / bytes_out as f64);
    assert!(
        statistics[..2].iter().all(|one| one.is_enabled && one.statistics.failed == 0 && one.statistics.completed > 50)
    );
    assert!(bytes_out * 2 < bytes_in);
}

#[test]
#[ignore = "needs libqatzip.so.3"]
fn qatzip_output_decodes() {
    makes_what_decodes("qat");
}

#[test]
#[ignore = "needs libqpl.so.1"]
fn qpl_output_decodes() {
    makes_what_decodes("iaa");
}
