// Streams generations from Sluice's gRPC API; any fault ends the program with exit code 1.
//
// go run main.go 127.0.0.1:50051
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "sluice/v1"
)

// stream calls each with the new text of every message, until the generation ends or each returns false. Returning
// cancels the context, and the server ends the request.
func stream(ctx context.Context, client pb.GenerationServiceClient, request *pb.GenerateRequest, each func(string) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer, err := client.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		message, err := answer.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, delta := range message.Deltas {
			if !each(delta.Text) {
				return nil
			}
		}
	}
}

func newRequest(maxTokens int32) *pb.GenerateRequest {
	temperature, ignoreEOS := float32(0), true
	return &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: "Once upon a time"},
		Sampling: &pb.SamplingParams{Temperature: &temperature},
		Stopping: &pb.StopParams{MaxTokens: &maxTokens, IgnoreEos: &ignoreEOS},
	}
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewGenerationServiceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	text := ""
	if err := stream(ctx, client, newRequest(12), func(piece string) bool { text += piece; return true }); err != nil {
		log.Fatal(err)
	}

	pieces := 0
	if err := stream(ctx, client, newRequest(2000), func(string) bool { pieces++; return pieces < 3 }); err != nil {
		log.Fatal(err)
	}

	short, cancelShort := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancelShort()
	late := stream(short, client, newRequest(2000), func(string) bool { return true })
	if status.Code(late) != codes.DeadlineExceeded {
		log.Fatalf("a generation of 2000 tokens ended within 200 ms: %v", late)
	}
	fmt.Printf("%q, cancelled after %d pieces, %v\n", text, pieces, status.Code(late))
}
