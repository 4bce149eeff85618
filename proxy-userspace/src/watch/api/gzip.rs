//! Asks the API server for gzip, as client-go does, and decodes what it compressed.

use std::io;

use async_compression::tokio::bufread::GzipDecoder;
use bytes::Bytes;
use futures::TryStreamExt as _;
use http::{
    HeaderValue, Request, Response,
    header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH},
};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody, combinators::UnsyncBoxBody};
use kube::client::Body;
use tokio_util::io::{ReaderStream, StreamReader};
use tower::BoxError;

const GZIP: HeaderValue = HeaderValue::from_static("gzip");

/// The body of a response, decoded.
pub(super) type DecodedBody = UnsyncBoxBody<Bytes, BoxError>;

/// Accepts gzip in the response.
pub(super) fn accept(mut request: Request<Body>) -> Request<Body> {
    request.headers_mut().insert(ACCEPT_ENCODING, GZIP);
    request
}

/// Decodes the body of a response that is compressed.
///
/// A list is one gzip member. The streaming lists of Kubernetes 1.37 have a member for each flush,
/// until the watch ends (`perFlushGzipWriter` in `k8s.io/apiserver`).
pub(super) fn decode<B>(response: Response<B>) -> Response<DecodedBody>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let (mut head, body) = response.into_parts();
    if head.headers.get(CONTENT_ENCODING) != Some(&GZIP) {
        return Response::from_parts(head, body.map_err(Into::into).boxed_unsync());
    }
    head.headers.remove(CONTENT_ENCODING);
    head.headers.remove(CONTENT_LENGTH);
    let compressed = StreamReader::new(body.into_data_stream().map_err(io::Error::other));
    let mut decoder = GzipDecoder::new(compressed);
    decoder.multiple_members(true);
    let frames = ReaderStream::new(decoder).map_ok(Frame::data).map_err(Into::into);
    Response::from_parts(head, StreamBody::new(frames).boxed_unsync())
}
